"""Manage memory of the host: how much there is, where it comes from, and copies between it and a device."""
