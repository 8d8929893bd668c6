"""Write tensor files sequentially with checksums, find the places of parameters in them, and read ranges of them."""
