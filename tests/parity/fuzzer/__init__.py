"""Random training scripts, run by hf_zero and by plain PyTorch.

``grammar.py`` draws and reads scripts, ``model.py`` defines the model and values that both sides draw alike, ``sequences.py`` a model with
attention for ranks that divide sequences, ``side.py`` everything that both sides share, ``engine.py`` and ``plain.py`` are the two sides,
``verdict.py`` compares them on ranks, ``known.py`` lists scripts that failed once, and ``report.py`` runs scripts by hand.
"""
