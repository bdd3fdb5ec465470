"""Any pass of any layer on tensor cores: k runs over tap groups, some source channels at one tap."""
