"""The user's optimizer over this rank's part of every unit."""
