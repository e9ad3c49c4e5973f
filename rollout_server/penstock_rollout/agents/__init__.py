"""Agent loops: how a prompt becomes a trajectory. By name, or by `package.module:function`."""
