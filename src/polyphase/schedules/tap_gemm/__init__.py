"""Any pass of any layer on tensor cores: the sum runs over tap groups, some source channels at one tap."""
