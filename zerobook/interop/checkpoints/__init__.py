"""Checkpoints of other trainers: transformers' Trainer, DeepSpeed, accelerate and FSDP."""
