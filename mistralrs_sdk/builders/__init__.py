"""What describes a model before there is one."""
