"""Where state rests when it is not on the training device: host memory and NVMe files, and how much of the host may be taken."""
