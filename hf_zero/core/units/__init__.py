"""What is sharded: parameters in flat buffers, divided over ranks."""
