"""Complete a checkpoint on all ranks or on none.

The modules handle errors of some ranks, staging folders, checkpoint names, saves in the background and node-local disks.
"""
