"""Choosing a kernel's configuration."""
