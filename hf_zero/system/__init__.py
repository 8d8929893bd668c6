"""The process: its files, files of other programs that it reads, its exit status, its secrets, its C library. Uses the standard library
only.
"""
