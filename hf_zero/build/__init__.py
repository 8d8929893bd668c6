"""From a module and a resolved configuration to the parts of an engine."""
