"""Expert exchange through DeepEP, a library for GPUs joined by NVLink and RDMA."""
