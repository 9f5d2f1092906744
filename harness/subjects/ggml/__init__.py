"""Subjects that compute with ggml's graphs, on its CPU or Vulkan backend."""
