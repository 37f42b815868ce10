"""Names the package that has hvdkit's Ray workers."""

raise ModuleNotFoundError(
    "hvdkit.ray is the package hvdkit-ray: run `pip install -c constraints.txt ./packages/ray` in a clone of "
    "hvdkit, and write `import hvdkit_ray`.",
    name="hvdkit_ray",
)
