"""Elastic jobs, which continue or restart when ranks or hosts are lost."""
