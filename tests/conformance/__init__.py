"""The rules of the design as checks that every function and layer passes, and broken ones that each check
catches.
"""
