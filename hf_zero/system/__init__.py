"""Handle the process: its files, files of others that it reads, its exit status, its secrets, its C library. Uses the standard library
only.
"""
