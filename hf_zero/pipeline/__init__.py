"""Pipeline parallelism: a model divided by layers over ranks, its own forward run on every one of them."""
