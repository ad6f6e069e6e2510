"""Augmentation of image batches, and which member gets which policy.

All functions work on a whole batch in the memory of the CPU, change nothing in place, and draw from a CPU generator
that is passed in, so results depend on the generator alone. A batch is processed in this order:

    uint8 images -> random_crop, random_flip -> policy.on_images -> normalize -> policy.on_batch -> network
"""
