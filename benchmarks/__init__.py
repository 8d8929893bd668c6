"""Measurements of speed, memory and bytes, one folder per topic; README.md lists them."""
