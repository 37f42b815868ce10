"""Writers: one file for each kind of target."""
