"""Names the package that has federated averaging."""

raise ModuleNotFoundError(
    "hvdkit.federated is the package hvdkit-federated: run `pip install -c constraints.txt ./packages/federated` in a "
    "clone of hvdkit, and write `import hvdkit_federated as federated`.",
    name="hvdkit_federated",
)
