"""Tests of what reads gpumap's metrics: boards, alerts, autoscaling rules and the fleet's recording rules."""
