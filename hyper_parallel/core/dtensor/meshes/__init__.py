"""Meshes: ranks arranged on axes, their arithmetic, and meshes cut out of meshes."""
