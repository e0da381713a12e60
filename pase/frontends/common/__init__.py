"""Code that several frontends share: values, products, slices, repeated layers."""
