"""dstrain: distributed pretraining of DeepSeek-V3-style models."""
