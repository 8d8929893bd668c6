"""The process: its files, files of other programs that it reads, its exit status, its secrets, its C library. Uses the standard library
only.

Only ``own_files.py`` (with ``folder.py``, an open folder) writes or deletes files, and it deletes only files of hf_zero ([Note: what is
written], [Note: what is deleted]); small files of other programs are read by ``text_file.py`` alone ([Note: bounded reading]).
``tests/house/test_files.py`` counts every other call, with the reasons of the few exceptions.
"""
