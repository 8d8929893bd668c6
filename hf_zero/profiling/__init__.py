"""Operations, time and parameters of a model's modules."""
