"""What several frontends share: values, products, slices, repeated layers."""
