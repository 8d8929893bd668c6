"""DeepSpeed's pipelines: models that are lists of layers, divided over stages."""
