"""What the examples share. Each script puts this folder's parent on its path, so that it runs by path from anywhere."""
