"""Which layers normalise. torch keeps the bases of its own private, so they are named one by one."""

from __future__ import annotations

from torch import nn

# What the three, and a user's own variants, have in common. The same class in torch.nn.modules.batchnorm has no public
# name; nn.SyncBatchNorm.convert_sync_batchnorm looks for it, too (seen in torch 2.13).
ANY_BATCH_NORM = nn.BatchNorm2d.__mro__[1]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# With num_features: axis 1 of their input.
FEATURE_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)
NORMS = (*FEATURE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
