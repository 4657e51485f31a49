"""MindSpore as a platform; the only folder that imports it."""
