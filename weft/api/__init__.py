"""What users write: LoRAAdapter and ServingPool (`serving.weft.dev/v1alpha1`), typed; the CRDs are made from them."""
