"""Dispatch and combine as calls of their own, for engines that bring their own experts."""
