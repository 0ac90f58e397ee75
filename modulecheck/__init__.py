"""Eager against `torch.compile`, module by module. Under construction: see CHANGELOG."""
