"""What all tests share."""

from hypothesis import HealthCheck, settings

settings.register_profile("pipeloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipeloom")
