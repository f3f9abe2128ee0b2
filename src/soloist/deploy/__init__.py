"""Many replicas of the server over a Ray cluster; scheduling over machines is Ray Serve's."""
