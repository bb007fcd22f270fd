"""Which layers normalise. torch keeps the bases of its own private, so they are named one by one."""

from __future__ import annotations

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# With num_features: axis 1 of their input.
FEATURE_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)
NORMS = (*FEATURE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
