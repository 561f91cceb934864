"""FlashKernel inside other libraries; each module here is imported only by who uses it."""
