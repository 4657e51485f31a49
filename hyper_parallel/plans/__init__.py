"""Ready plans: ``for_model(model)`` says how a model that was written for one device is cut."""

from hyper_parallel.plans.for_model import for_model
from hyper_parallel.plans.roles import PlanError
from hyper_parallel.plans.structure import Structure, structure_of

__all__ = ["PlanError", "Structure", "for_model", "structure_of"]
