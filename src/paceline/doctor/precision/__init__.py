"""Mixed precision and tensor cores.

backward_under_autocast   ``backward()`` runs under autocast
clip_before_unscale       Gradients are clipped while they are still scaled
float16_without_scaler    A network trains in float16 without a GradScaler
no_mixed_precision        A network computes in 32 bits, without autocast
scaler_bypassed           The loss is scaled, but the optimizer steps without the scaler
scaler_with_bfloat16      A GradScaler is used with autocast to bfloat16 only
scaler_without_update     The scaler is never updated
tensor_core_sizes         Layer sizes are not multiples of 8
trained_in_half           The weights that are trained are float16
unscaled_backward         A step goes through the scaler, but the loss was never scaled
update_before_step        The scaler is updated before it steps
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
