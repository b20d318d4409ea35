"""The layout contract on a config of the user's: one layout against one device, and what is at fault where they differ."""
