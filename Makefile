# `make LEG` runs one leg of CI in a fresh virtual environment, `make ci` all of them; .ci/run says what each is.
LEGS = quick lint horovod docs slow cluster real integrations

.PHONY: ci $(LEGS)

ci:
	bash .ci/run

$(LEGS):
	bash .ci/run $@
