"""Bridges to other libraries, one module and one extra each; nothing is imported before its use."""
