"""Adapters: each turns a trainer's moment into one call of ZClip, and its logger and checkpoint into channels."""
