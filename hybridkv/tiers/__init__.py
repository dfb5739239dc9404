"""Where prefixes go when the device has no room for them: host memory and disk."""
