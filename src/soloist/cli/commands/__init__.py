"""The commands and their options; what they do is in the modules beside this folder."""
