"""Random training scripts, run by hf_zero and by plain PyTorch: their grammar, both sides, the verdict, and scripts that failed once.

``grammar.py`` draws and reads scripts, ``model.py`` has the model and what both sides share, ``engine.py`` and ``plain.py`` are the sides,
``verdict.py`` compares them on ranks, ``known.py`` lists scripts that failed once, ``report.py`` runs scripts by hand.
"""
