"""The searches that can be named, each registered with `pase.search.registry.register`."""
