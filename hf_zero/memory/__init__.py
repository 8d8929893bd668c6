"""Memory of the host: how much there is, where it comes from, copies between it and a device."""
