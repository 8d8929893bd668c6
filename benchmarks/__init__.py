"""Measurements of speed, memory and bytes, one folder for each topic; README.md has the list."""
