"""Jobs that go on, or start again, when ranks or hosts are lost."""
